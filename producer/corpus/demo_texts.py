"""The texts of the demo corpus: everyday sentences in five languages, written for this project,
one per line.
"""

from __future__ import annotations

_ENGLISH = """
Good morning, how did you sleep?
The kettle is boiling again.
I left my keys on the kitchen table.
She opened the window and looked at the rain.
We can meet at half past seven.
The train to the coast leaves from platform 4.
My grandmother still bakes her own bread.
Could you turn the music down a little?
He never forgets a name or a face.
The garden smells of wet grass and roses.
Take the second street on the left.
There are 12 eggs in the basket.
Our neighbours have a very old cat.
It was getting dark when we came home.
Please close the door behind you.
The children built a small house out of snow.
I would like a cup of black coffee.
This bridge is more than 100 years old.
A cold wind blew across the empty square.
You should have told me earlier.
They sat by the river and talked until midnight.
The library closes at six on Fridays.
What a beautiful evening!
Nobody knew where the music came from.
The doctor asked him to breathe slowly.
My brother repairs bicycles and clocks.
We watched the ships leave the harbour.
I can hear the sea from my room.
The soup needs a little more salt.
Do you remember the name of that song?
Her first book was printed before the war.
The road goes up the hill and through the forest.
Everyone laughed except the teacher.
He put the letter back into his pocket.
The moon is brighter than I expected.
Bring a warm coat, it may snow tonight.
There is a bakery at the corner of our street.
The old radio only plays one station.
She painted the walls yellow and the door green.
I have never seen so many stars.
Wait for me at the entrance, please.
The farmer counted his sheep twice.
A little bird was singing on the roof.
Why are all the lights still on?
We missed the bus by 2 minutes.
The bread is fresh and the cheese is local.
His answer was short and honest.
I learned to swim in this lake.
The clock on the tower has stopped.
Let us walk home along the canal.
The river froze, so the boats could not move for weeks.
You can keep the book until the end of the month.
Someone had written a poem on the wall.
The market opens early and smells of fish and oranges.
It is easier to ask than to guess.
Thank you, that was very kind of you.
"""

_SPANISH = """
Buenos días, ¿cómo estás hoy?
La ventana de la cocina está abierta.
Mi abuela cuenta historias muy largas.
El tren llega a las 9 de la mañana.
No encuentro las llaves del coche.
Mañana vamos a la playa con los niños.
¿Puedes bajar un poco la música?
El perro duerme debajo de la mesa.
Me gusta caminar cuando llueve.
La tienda de la esquina vende pan fresco.
Ayer vimos una película muy triste.
El río pasa por el centro del pueblo.
Quiero un vaso de agua, por favor.
Mi hermano trabaja en un hospital.
Hay 15 sillas en la sala grande.
¡Qué noche tan tranquila!
Los pájaros cantan antes del amanecer.
Ella escribe cartas a mano todavía.
El mercado cierra temprano los domingos.
Nadie sabía la respuesta correcta.
La luna salió detrás de la montaña.
Compré naranjas, queso y un poco de miel.
¿Dónde está la estación de autobuses?
El viento movía las hojas del jardín.
Mi vecino toca la guitarra por las tardes.
La carta llegó con 3 días de retraso.
Abre la puerta, que ya están aquí.
Los niños juegan al fútbol en la plaza.
El café está demasiado caliente.
Nunca había visto un cielo tan azul.
Tenemos que hablar con la maestra.
La biblioteca guarda libros muy antiguos.
El gato subió al tejado otra vez.
Caminamos por la orilla hasta el puerto.
Dame un momento, ahora te ayudo.
El pan se hace con harina, agua y sal.
¿Por qué no me llamaste anoche?
La casa de mis padres tiene un patio pequeño.
Este reloj fue de mi bisabuelo.
Las calles estaban vacías a medianoche.
El médico le dijo que descansara.
Aprendí a nadar en este lago.
La profesora explicó la lección dos veces.
Siempre llegamos tarde a las fiestas.
El barco salió del puerto sin hacer ruido.
Pinté la puerta de verde y la pared de blanco.
¿Te acuerdas de aquella canción?
La sopa necesita un poco más de sal.
En invierno la nieve cubre los tejados.
Mi hija tiene 7 años y ya sabe leer.
Dejé el paraguas en la oficina.
El camino sube entre los olivos.
Todos se rieron, menos el camarero.
Hace mucho frío, lleva un abrigo.
Gracias por la cena, estaba deliciosa.
Vuelve pronto, te vamos a extrañar.
"""

_GERMAN = """
Guten Morgen, hast du gut geschlafen?
Der Zug nach Hamburg hat heute Verspätung.
Ich habe meinen Schlüssel vergessen.
Die Kinder spielen draußen im Schnee.
Möchtest du noch eine Tasse Tee?
Unser Nachbar füttert jeden Tag die Vögel.
Das Fenster klemmt schon seit Wochen.
Im Sommer baden wir gern im See.
Sie liest ihrer Tochter jeden Abend vor.
Der Bäcker öffnet um 6 Uhr.
Wo ist denn der nächste Bahnhof?
Gestern hat es den ganzen Tag geregnet.
Die alte Brücke führt über den Fluss.
Mein Bruder repariert gerne Fahrräder.
Bitte mach die Tür leise zu.
Auf dem Markt gibt es frische Äpfel.
Er hat den Brief nie abgeschickt.
Das war wirklich ein schöner Abend!
Die Katze schläft auf dem warmen Ofen.
Wir treffen uns um halb acht am Brunnen.
Niemand wusste, woher die Musik kam.
Der Wald riecht nach Moos und Regen.
Kannst du mir bitte das Salz geben?
Meine Großmutter backt den besten Kuchen.
Das Buch hat genau 300 Seiten.
Am Sonntag wandern wir durch die Berge.
Die Straße war leer und still.
Ich lerne seit zwei Jahren Klavier.
Der Lehrer erklärte die Aufgabe noch einmal.
Es wird heute Nacht sehr kalt.
Warum brennt hier noch Licht?
Die Uhr am Turm ist stehen geblieben.
Nimm lieber einen Regenschirm mit.
Das Schiff verließ den Hafen im Nebel.
Sie lachte und winkte uns zu.
In der Küche duftet es nach Zimt.
Der Garten ist klein, aber voller Blumen.
Wir haben noch 5 Minuten Zeit.
Hast du die Zeitung schon gelesen?
Der Mond scheint heller als sonst.
Mein Vater trinkt seinen Kaffee schwarz.
Am Ende der Straße steht eine alte Mühle.
Er sprach langsam und sehr deutlich.
Die Suppe ist noch viel zu heiß.
Früher wohnten hier drei Familien.
Ich höre das Meer bis in mein Zimmer.
Das Mädchen malte ein blaues Pferd.
Vielen Dank für deine Hilfe!
Der Bus fährt nur einmal in der Stunde.
Sag ihr einen lieben Gruß von mir.
Die Bibliothek schließt freitags früher.
Wer hat den letzten Keks gegessen?
Im Keller stehen noch alte Kisten.
Der Wind hat das Dach beschädigt.
Komm gut nach Hause und schlaf schön.
Morgen wird bestimmt wieder die Sonne scheinen.
"""

_PERSIAN = """
صبح بخیر، دیشب خوب خوابیدی؟
پنجرهٔ آشپزخانه باز مانده است.
فردا با بچه‌ها به کنار دریا می‌رویم.
مادربزرگم هنوز نان را خودش می‌پزد.
قطار ساعت ۸ از ایستگاه راه می‌افتد.
لطفاً در را آرام ببند.
کلیدهایم را روی میز جا گذاشته‌ام.
امروز هوا خیلی سرد است.
یک فنجان چای داغ می‌خواهم.
گربهٔ همسایه روی دیوار خوابیده است.
برادرم در بیمارستان کار می‌کند.
کتاب‌ها را به کتابخانه پس دادم.
در این کوچه ۵ خانهٔ قدیمی هست.
باران تمام شب بارید.
چرا دیروز به من زنگ نزدی؟
بازار صبح‌ها شلوغ‌تر است.
پرنده‌ها پیش از طلوع آفتاب می‌خوانند.
او نامه‌هایش را با دست می‌نویسد.
ماه از پشت کوه بیرون آمد.
ما تا نیمه‌شب کنار رودخانه نشستیم.
هیچ‌کس جواب درست را نمی‌دانست.
ایستگاه اتوبوس کجاست؟
باد برگ‌های باغ را تکان می‌داد.
دخترم ۷ سال دارد و خواندن بلد است.
سوپ کمی نمک می‌خواهد.
چه شب آرام و زیبایی!
پدرم هر روز روزنامه می‌خواند.
بچه‌ها در حیاط توپ بازی می‌کنند.
این پل بیش از صد سال عمر دارد.
لباس گرم بپوش، شاید برف ببارد.
آخر هفته به کوه خواهیم رفت.
صدای دریا تا اتاق من می‌رسد.
معلم درس را دوباره توضیح داد.
خیابان‌ها خالی و ساکت بودند.
آیا نام آن ترانه را به یاد داری؟
نانوایی سر کوچه نان تازه دارد.
من در همین دریاچه شنا یاد گرفتم.
ساعت بالای برج از کار افتاده است.
نامه با ۳ روز تأخیر رسید.
از کمک شما بسیار سپاسگزارم.
چراغ‌های شهر از دور پیدا بود.
خواهرم نقاشی و موسیقی را دوست دارد.
کشتی بی‌صدا از بندر دور شد.
پیرمرد قصه‌های زیبایی می‌گفت.
هرگز آسمانی به این آبی ندیده بودم.
راه از میان جنگل می‌گذرد.
همه خندیدند، جز آشپز.
چند لحظه صبر کن، الان می‌آیم.
دیوار را سفید و در را سبز کردیم.
باغچهٔ ما کوچک، ولی پر از گل است.
این کتاب ۲۰۰ صفحه دارد.
زمستان‌ها بام خانه‌ها سفید می‌شود.
شام خوشمزه‌ای بود، دست شما درد نکند.
مسافران خسته زود خوابیدند.
زود برگرد، دلمان برایت تنگ می‌شود.
شب بخیر، فردا می‌بینمت.
"""

_ARABIC = """
صباح الخير، كيف حالك اليوم؟
نافذة المطبخ مفتوحة منذ الصباح.
جدتي تخبز الخبز في البيت.
يصل القطار في الساعة 9 صباحا.
نسيت المفاتيح على الطاولة.
سنذهب غدا إلى البحر مع الأطفال.
هل يمكنك أن تغلق الباب؟
القط نائم تحت الكرسي.
أحب المشي عندما ينزل المطر.
أريد كوبا من الشاي الساخن.
أخي يعمل في المستشفى الكبير.
في القاعة 15 كرسيا.
يا لها من ليلة هادئة!
تغني العصافير قبل شروق الشمس.
ما زالت تكتب رسائلها باليد.
لم يعرف أحد الجواب الصحيح.
طلع القمر من وراء الجبل.
اشتريت البرتقال والجبن والعسل.
أين محطة الحافلات من فضلك؟
حركت الريح أوراق الحديقة.
يعزف جارنا على العود كل مساء.
وصلت الرسالة متأخرة 3 أيام.
يلعب الأولاد بالكرة في الساحة.
القهوة ساخنة جدا.
لم أر سماء زرقاء كهذه من قبل.
يجب أن نتحدث مع المعلمة.
في المكتبة كتب قديمة ونادرة.
صعد القط إلى السطح مرة أخرى.
مشينا على الشاطئ حتى الميناء.
انتظرني قليلا، سوف أساعدك الآن.
لماذا لم تتصل بي أمس؟
بيت والدي له حديقة صغيرة.
كانت الشوارع فارغة عند منتصف الليل.
قال له الطبيب أن يستريح.
تعلمت السباحة في هذه البحيرة.
شرح المعلم الدرس مرتين.
غادرت السفينة الميناء بهدوء.
هل تذكر اسم تلك الأغنية؟
يحتاج الحساء إلى قليل من الملح.
يغطي الثلج السطوح في الشتاء.
ابنتي عمرها 7 سنوات وتعرف القراءة.
تركت المظلة في المكتب.
يصعد الطريق بين أشجار الزيتون.
ضحك الجميع إلا الطباخ.
الجو بارد، خذ معطفك معك.
شكرا على العشاء، كان لذيذا.
السوق مزدحم في الصباح.
قرأت الجريدة وشربت القهوة.
هذا الجسر قديم وجميل.
أسمع صوت البحر من غرفتي.
جلسنا بجانب النهر وتحدثنا طويلا.
عند الزاوية مخبز صغير.
عد إلينا قريبا، سنشتاق إليك.
توقفت الساعة فوق البرج.
سافر عمي إلى مدينة بعيدة.
تصبح على خير، نلتقي غدا.
"""

TEXTS: dict[str, tuple[str, ...]] = {
    "en": tuple(_ENGLISH.strip().splitlines()),
    "es": tuple(_SPANISH.strip().splitlines()),
    "de": tuple(_GERMAN.strip().splitlines()),
    "fa": tuple(_PERSIAN.strip().splitlines()),
    "ar": tuple(_ARABIC.strip().splitlines()),
}
